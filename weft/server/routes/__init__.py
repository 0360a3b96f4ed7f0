"""One file per family of the API. Each gives its routes; `weft.server.app` puts them together."""
