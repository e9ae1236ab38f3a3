"""Commands that send, show and resolve transactions."""
