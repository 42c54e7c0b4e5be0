"""What several test files share: models of every family, random plans, and comparison with the single-process model."""
