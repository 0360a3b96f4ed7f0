"""Training code for the assets that ship in the package."""
