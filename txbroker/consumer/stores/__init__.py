"""Where positions are kept, other than in the group's offsets."""
