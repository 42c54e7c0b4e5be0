"""Published tables, predicted: what others measured beside what autopar's prices and simulator say of the same plan."""
