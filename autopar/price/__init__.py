"""Price: seconds and bytes of strategies and layout changes."""
