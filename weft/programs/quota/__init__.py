"""What runs, tenants and the server may hold and use: limits, accounts, rates, and shares of the event loop."""
