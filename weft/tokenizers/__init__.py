"""Text to token ids and back, and chat messages to text. Lives in the front; engines speak ids only."""
