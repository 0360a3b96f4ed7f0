"""The endpoints without HTTP. Each turns a decoded body and its record into a response or a stream, or raises."""
