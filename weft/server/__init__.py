"""The HTTP front: the API that OpenAI clients know, over the programs of `weft.programs`."""
