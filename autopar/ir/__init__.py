"""What every stage reads: the graph as plain values, layouts, the mesh, and what an operator does and holds."""
