"""How long the device takes: shapes of steps, fitted models, profiles, and their correction while serving. Pure."""
