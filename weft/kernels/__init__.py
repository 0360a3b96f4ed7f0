"""The numerical operations of a forward pass: contracts, a reference in plain torch, and faster variants."""
