"""What answers the calls of a run: models of ours through their endpoints, and any server with OpenAI's API."""
