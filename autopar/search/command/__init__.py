"""What the command line of a search is told, and the model that it makes."""
