"""One module per API family, with its routes; `weft.server.app` combines them."""
