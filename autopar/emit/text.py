"""What is emitted, as text."""

from __future__ import annotations

import re

from torch import fx


def commented(module: fx.GraphModule) -> str:
    """The code of a module, each line with the comment that its node has."""
    comment_of = {node.name: node.meta.get("comment", "") for node in module.graph.nodes}
    lines: list[str] = []
    for line in module.code.strip().splitlines():
        made = re.match(r"    (\w+) = ", line)
        comment = comment_of.get(made.group(1), "") if made else ""
        lines.append(f"{line.split(';  ')[0]}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"
