"""Requests and responses of the server alone: programs, runs, health and traces."""
