"""SDK sessions: WebSockets that carry many operations a frame."""
