"""What has to be seen on a GPU once: `python -m benchmarks.gpu`."""
