"""The endpoints without HTTP: a decoded body and its record become a response, a stream of chunks, or an error."""
