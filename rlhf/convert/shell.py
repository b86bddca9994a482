"""Reads the commands of a shell script without running any of them: variables, arrays, `if` and `case` are evaluated.

tree-sitter parses the script. Commands are recorded, not run; `echo` prints and every other command fails, so that
``$(python -c 'import torch_npu' && echo npu || echo gpu)`` gives gpu.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    from tree_sitter import Node


@dataclass(frozen=True)
class Script:
    """The commands that a script would have run."""

    commands: tuple[tuple[str, ...], ...]
    """The words of each command, in order."""
    assumptions: tuple[str, ...]
    """Assumptions about parts that cannot be known without running them, one sentence each."""


def read_script(text: str, where: str, environment: Mapping[str, str]) -> Script:
    """Reads a shell script; `environment` has the values of variables that the script does not set.

    Raises UserError if the script is not valid, or has an unsupported expansion; the message names the line.
    """
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    tree = Parser(Language(tree_sitter_bash.language())).parse(text.encode())
    shell = _Shell(text.encode(), where, environment)
    with contextlib.suppress(_Exit):
        shell.run(tree.root_node)
    commands, assumptions = list(shell.commands), list(shell.assumptions)
    for words in shell.commands:
        for option, script in itertools.pairwise(words):
            if option == "-c" and words[words.index(option) - 1].rpartition("/")[2] in ("bash", "sh"):
                inner = read_script(script, where, environment)
                commands += inner.commands
                assumptions += inner.assumptions
    return Script(tuple(commands), tuple(dict.fromkeys(assumptions)))


class _Exit(Exception):
    """The script exits."""


OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}

NOT_RUN = {
    "for_statement": "the loop",
    "c_style_for_statement": "the loop",
    "while_statement": "the loop",
    "function_definition": "the function",
}


@dataclass
class _Shell:
    source: bytes
    where: str
    environment: Mapping[str, str]
    variables: dict[str, list[str]] = field(default_factory=dict)
    """A plain variable is an array of one word, as in Bash."""
    commands: list[tuple[str, ...]] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    output: list[str] | None = None
    """Output of `echo` within a command substitution."""

    def run(self, node: Node) -> bool:
        """Evaluates a statement; returns True if it succeeds."""
        if node.type == "ERROR" or node.is_missing:
            raise self._error(node, "is not valid in Bash")
        if node.type in NOT_RUN:
            self._assume(node, f"{NOT_RUN[node.type]} is left out")
            return True
        evaluate: dict[str, Callable[[Node], bool]] = {
            "variable_assignment": self._assign,
            "declaration_command": self._declare,
            "command": self._command,
            "list": self._list,
            "pipeline": lambda pipeline: self.run(pipeline.named_children[0]),
            "negated_command": lambda negated: not self.run(negated.named_children[0]),
            "redirected_statement": self._redirected,
            "test_command": lambda test: self._test(test.named_children[0]) if test.named_children else False,
            "if_statement": self._if,
            "case_statement": self._case,
            "comment": lambda _: True,
            "heredoc_body": lambda _: True,
        }
        if node.type in evaluate:
            return evaluate[node.type](node)
        succeeds = True
        for child in node.named_children:  # a program, a group in braces, a branch
            succeeds = self.run(child)
        return succeeds

    def _assign(self, node: Node) -> bool:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        assert name is not None
        adds = any(child.type == "+=" for child in node.children)
        variable = self._text(name)
        if value is not None and value.type == "array":
            words = [word for child in value.named_children if child.type != "comment" for word in self._words(child)]
            self.variables[variable] = (self.variables.get(variable, []) if adds else []) + words
        else:
            before = "".join(self.variables.get(variable, [])[:1]) if adds else ""
            self.variables[variable] = [before + (" ".join(self._expand(value)) if value is not None else "")]
        return True

    def _declare(self, node: Node) -> bool:
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child)
        return True

    def _command(self, node: Node) -> bool:
        words: list[str] = []
        for child in node.named_children:
            if child.type == "command_name":
                words += self._words(child.named_children[0])
            elif child.type not in ("variable_assignment", "file_redirect", "herestring_redirect"):
                words += self._words(child)
        if not words:
            return True
        if words[0] == "exit":
            raise _Exit
        if words[0] == "echo" and self.output is not None:
            self.output.append(" ".join(words[1:]))
        if words[0] in ("test", "["):
            raise self._error(node, "is not understood: write it as [ ... ]")
        self.commands.append(tuple(words))
        # other commands are not run, and count as failed
        return words[0] in ("echo", "true", ":", "set", "export", "cd", "mkdir", "pip")

    def _redirected(self, node: Node) -> bool:
        succeeds = self.run(node.named_children[0])
        for document in (child for child in node.named_children if child.type == "heredoc_redirect"):
            body = next((child for child in document.named_children if child.type == "heredoc_body"), None)
            if self.commands and self.commands[-1][0] == "read" and body is not None:
                inner = [child for child in body.named_children if child.type != "heredoc_content"]
                text = self._joined(body.start_byte, inner, body.end_byte)
                self.variables[self.commands[-1][-1]] = [text.replace("\\\n", "")]
        return succeeds

    def _list(self, node: Node) -> bool:
        first, second = node.named_children[0], node.named_children[-1]
        succeeds = self.run(first)
        joint = next((child.type for child in node.children if child.type in ("&&", "||")), ";")
        if joint == ";" or succeeds == (joint == "&&"):
            return self.run(second)
        return succeeds

    def _if(self, node: Node) -> bool:
        condition, *rest = [child for child in node.named_children if child.type != "comment"]
        if self.run(condition):
            for child in rest:
                if child.type not in ("elif_clause", "else_clause"):
                    self.run(child)
            return True
        for child in rest:
            if child.type == "else_clause":
                return self.run(child)
            if child.type == "elif_clause" and self._elif(child):
                return True
        return True

    def _elif(self, node: Node) -> bool:
        condition, *rest = [child for child in node.named_children if child.type != "comment"]
        if not self.run(condition):
            return False
        for child in rest:
            self.run(child)
        return True

    def _case(self, node: Node) -> bool:
        value = node.child_by_field_name("value")
        assert value is not None
        text = " ".join(self._expand(value))
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            if any(fnmatchcase(text, " ".join(self._expand(pattern))) for pattern in patterns):
                for child in item.named_children:
                    if child not in patterns:
                        self.run(child)
                break
        return True

    def _test(self, node: Node) -> bool:
        if node.type == "parenthesized_expression":
            return self._test(node.named_children[0])
        if node.type == "unary_expression":
            sign, operand = self._text(node.children[0]), node.named_children[-1]
            if sign == "!":
                return not self._test(operand)
            if sign in ("-z", "-n"):
                return (" ".join(self._expand(operand)) == "") == (sign == "-z")
            self._assume(node, f"{self._text(node)} is false")
            return False
        if node.type == "binary_expression":
            left, right = node.named_children[0], node.named_children[-1]
            sign = self._text(next(child for child in node.children[1:] if child.end_byte <= right.start_byte))
            if sign in ("&&", "-a"):
                return self._test(left) and self._test(right)
            if sign in ("||", "-o"):
                return self._test(left) or self._test(right)
            left_text, right_text = " ".join(self._expand(left)), " ".join(self._expand(right))
            if sign in ("=", "==", "!="):
                return fnmatchcase(left_text, right_text) == (sign != "!=")
            if sign in COMPARISONS:
                return COMPARISONS[sign](self._integer(node, left_text), self._integer(node, right_text))
            raise self._error(node, "is not understood")
        return " ".join(self._expand(node)) != ""

    def _words(self, node: Node) -> list[str]:
        """Expands a word of the script: quoted words stay whole, others are split at spaces."""
        expanded = self._expand(node)
        is_quoted = node.type in ("string", "raw_string", "ansi_c_string", "concatenation", "word", "number")
        return expanded if is_quoted else [word for text in expanded for word in text.split()]

    def _expand(self, node: Node) -> list[str]:
        """Returns the words of an expression, unsplit: more or less than one only for arrays."""
        if node.type == "string":
            inner = node.children[1:-1]
            if len(inner) == 1 and self._is_whole_array(inner[0]):
                return self._expand(inner[0])
            return [self._joined(node.children[0].end_byte, inner, node.children[-1].start_byte)]
        if node.type == "concatenation":
            return ["".join(" ".join(self._expand(child)) for child in node.named_children or node.children)]
        if node.type in ("raw_string", "ansi_c_string"):
            return [self._text(node).removeprefix("$").strip("'")]
        if node.type == "string_content":
            return [re.sub(r'\\([$`"\\])', r"\1", self._text(node).replace("\\\n", ""))]
        if node.type in ("simple_expansion", "expansion"):
            return self._variable(node)
        # within ${a:-...}, tree-sitter takes the latter for a command
        is_arithmetic = node.type == "command_substitution" and self._text(node).startswith("$((")
        if node.type == "arithmetic_expansion" or is_arithmetic:
            return [str(self._arithmetic(node, self._text(node)[3:-2].strip()))]
        if node.type == "command_substitution":
            return [self._substituted(node)]
        if node.type == "process_substitution":
            raise self._error(node, "is not understood")
        return [re.sub(r"\\(.)", r"\1", self._text(node).replace("\\\n", ""))]

    def _joined(self, start: int, nodes: list[Node], end: int) -> str:
        """Returns the text of neighbouring nodes, and of the gaps between them."""
        text = ""
        for node in nodes:
            text += self.source[start : node.start_byte].decode() + " ".join(self._expand(node))
            start = node.end_byte
        return text + self.source[start:end].decode()

    def _is_whole_array(self, node: Node) -> bool:
        return self._text(node) in ("$@", "${@}") or (node.type == "expansion" and "[@]" in self._text(node))

    def _variable(self, node: Node) -> list[str]:
        # in a string, a space before the variable may be part of its node
        before, text = self._text(node).split("$", 1)
        text = text.removeprefix("{").removesuffix("}")
        if before:
            return [before + " ".join(self._value(node, text))]
        return self._value(node, text)

    def _value(self, node: Node, text: str) -> list[str]:
        """Returns the words of a variable; `text` is the expansion without its sign and braces."""
        match = re.match(r"(\w+|[@*#?])(\[[@*0-9]+\])?(:?[-=+?])?", text, re.DOTALL)
        if match is None or (match.end() < len(text) and match[3] is None):
            raise self._error(node, "is not understood: write the value out")
        name, index, sign = match.groups()
        if name == "#":
            self._assume(node, "the script has as many arguments as it wants")
            return ["100"]
        values = self.variables.get(name)
        if values is None and name in self.environment:
            values = [self.environment[name]]
        if values is not None and index is not None and index[1:-1].isdigit():
            values = values[int(index[1:-1]) : int(index[1:-1]) + 1]
        elif values is not None and index is None and name not in "@*":
            values = values[:1]
        is_set = bool(values) and (any(values or ()) or not (sign or "").startswith(":"))
        if sign is None:
            if values is None and name not in ("@", "*", "?"):
                self._assume(node, f"{name} is not set: it is taken as empty")
            return values or ([] if index is not None or name in "@*" else [""])
        if sign.endswith("+"):
            return self._alternative(node, sign) if is_set else [""]
        if is_set and values is not None:
            return values
        default = self._alternative(node, sign)
        if sign.endswith("="):
            self.variables[name] = default
        return default

    def _alternative(self, node: Node, sign: str) -> list[str]:
        """Returns the text behind the sign of ``${name:-text}``."""
        position = next((index for index, child in enumerate(node.children) if child.type == sign), None)
        if position is None:
            raise self._error(node, "is not understood: write the value out")
        inner = node.children[position + 1 : -1]
        return [self._joined(node.children[position].end_byte, inner, node.children[-1].start_byte)]

    def _substituted(self, node: Node) -> str:
        """Returns the output of the `echo` commands of a command substitution."""
        # commands of a substitution are not the script's
        outer, commands = self.output, self.commands
        self.output, self.commands = [], []
        for child in node.named_children:
            self.run(child)
        printed, unknown = "\n".join(self.output), [words[0] for words in self.commands if words[0] != "echo"]
        self.output, self.commands = outer, commands
        if unknown:
            self._assume(node, f"{self._text(node)} is not run: {printed!r} is taken as its output")
        return printed

    def _arithmetic(self, node: Node, text: str) -> int:
        expression = re.sub(r"\$\{?(\w+)\}?", r"\1", text)

        def value(part: ast.expr) -> int:
            if isinstance(part, ast.Constant) and isinstance(part.value, int):
                return part.value
            if isinstance(part, ast.Name):
                named = self.variables.get(part.id) or [self.environment.get(part.id, "0")]
                return self._integer(node, named[0] or "0")
            if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub):
                return -value(part.operand)
            if isinstance(part, ast.BinOp) and type(part.op) in OPERATORS:
                return OPERATORS[type(part.op)](value(part.left), value(part.right))
            raise self._error(node, "is not understood: write the number out")

        try:
            return value(ast.parse(expression, mode="eval").body)
        except (SyntaxError, ZeroDivisionError):
            raise self._error(node, "is not understood: write the number out") from None

    def _integer(self, node: Node, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise self._error(node, f"needs a number, not {text!r}") from None

    def _text(self, node: Node) -> str:
        return self.source[node.start_byte : node.end_byte].decode()

    def _error(self, node: Node, reason: str) -> UserError:
        shown = " ".join(self._text(node).split())[:60]
        return UserError(f"{self.where}, line {node.start_point[0] + 1}: {shown} {reason}")

    def _assume(self, node: Node, assumption: str) -> None:
        self.assumptions.append(f"line {node.start_point[0] + 1}: {' '.join(assumption.split())}")


def launches(commands: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Finds the commands that start a Python program: the module or file, and its arguments.

    accelerate's number of processes is one of them.
    """
    for words in commands:
        for position, word in enumerate(words):
            before, after = words[:position], words[position + 1 :]
            if word == "trl" and after:
                yield f"trl {after[0]}", after[1:]
                break
            is_module = bool(before) and before[-1] in ("-m", "--module") and "." in word
            if is_module or (word.endswith(".py") and bool(before) and not before[-1].startswith("--")):
                at = before.index("--num_processes") if "--num_processes" in before else None
                yield word, (*(before[at : at + 2] if at is not None else ()), *after)
                break
