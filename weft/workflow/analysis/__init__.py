"""What is known of a workflow before it runs: its calls and their prompts, lengths, objectives and bounds. Pure."""
