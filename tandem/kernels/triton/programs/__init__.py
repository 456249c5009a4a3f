"""What runs on the device: Triton programs and nothing else. The modules beside this package launch them."""
