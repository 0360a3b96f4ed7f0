"""Sessions: graphs that grow while they run, whose variables are futures (Parrot, section 4.1)."""
