"""Requests and responses as msgspec structs: what is checked, documented and sent, in one place each."""
