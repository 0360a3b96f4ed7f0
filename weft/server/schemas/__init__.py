"""Requests and responses that only the server has: programs, runs, health and traces."""
