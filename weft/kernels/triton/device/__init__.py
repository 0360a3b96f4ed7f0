"""What Triton compiles. Sizes in capitals are known when it compiles; everything else is a pointer or a number."""
