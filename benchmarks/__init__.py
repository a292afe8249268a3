"""What the README claims, as commands: `python -m benchmarks layer --config gpt`."""
