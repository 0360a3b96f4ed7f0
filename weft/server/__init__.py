"""The HTTP front: OpenAI's API over the programs of `weft.programs`."""
