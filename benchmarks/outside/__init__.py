"""Models and training snippets that nobody here wrote, each trained by autopar beside plain PyTorch."""
