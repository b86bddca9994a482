"""The type checker that holds calls to the shapes in their hints; an int may stand for a float, as Python has it."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
