"""The page that shows runs: `ratchet ui` serves it live, and `ratchet report` writes it into one HTML file.

`documents` defines its data, `page` builds its HTML, `server` serves both, and `static/` is the front end.
"""
