"""What the modules of flax/ and nnx/ compute, and check, whatever holds their parameters."""
