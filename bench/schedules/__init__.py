"""Scheduling problems of small workflows, their optima by two independent methods, and simple orders."""
