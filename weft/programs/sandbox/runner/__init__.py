"""What runs inside the sandbox: sources that `build_runner` packs into a component. Never imported by the host."""
