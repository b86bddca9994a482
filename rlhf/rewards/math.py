"""Mathematics in LaTeX, compared by the math-verify library (extra `math`): ``\\frac12`` is ``0.5``.

The last ``\\boxed{...}`` is read, or else the LaTeX that math-verify finds, or else the last number. It is parsed as
LaTeX alone: math-verify's own way with plain expressions would evaluate them as Python. What could make a computer
algebra system work for ever (towers of powers, factorials, endless digits) is refused before it gets there: 0.0.
"""

import re
from typing import Any

from rlhf.rewards.gsm8k import NUMBER

TAIL = 1_000
"""Characters of the response that are read, from its end."""
SECONDS = 3
"""For reading, and for comparing."""

_ENDLESS = re.compile(
    r"[0-9]{31}"  # digits
    r"|(?:\^|\*\*)[^+\-=,;$]*(?:\^|\*\*)"  # a power of a power
    r"|(?:\^|\*\*)\s*[{(]*\s*-?\s*[0-9]{4}"  # a large one
    r"|[0-9]{4}\s*[})]*\s*!|!\s*[})]*\s*!"  # factorials
    r"|(?:[{(\[]\s*){33}"  # depth
)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 or 0.0."""
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig()]
    marked = "$" in ground_truth or "\\boxed" in ground_truth
    truth = parse(ground_truth if marked else f"${ground_truth}$", latex)
    if not truth:
        raise ValueError(f"math-verify does not understand the ground truth {ground_truth!r}")
    text = solution_str[-TAIL:]
    answer = boxed(text) or text
    if not re.search(r"\$|\\[(\[b]", answer) and (numbers := NUMBER.findall(answer)):
        answer = f"${numbers[-1].strip()}$"
    if _ENDLESS.search(answer) or (not answer.isprintable() and "\x00" in answer):
        return 0.0
    return float(verify(truth, parse(answer, latex, parsing_timeout=SECONDS), timeout_seconds=SECONDS))


def boxed(text: str) -> str | None:
    """The last complete ``\\boxed{...}``, itself included."""
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start : place + 1]
    return None
