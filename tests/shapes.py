"""The type checker that checks the shapes in the hints of calls; an int may stand for a float, as in Python."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
