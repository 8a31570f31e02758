"""A fleet in virtual time: simulated engines by the thousand, routed by the policies and the index that ship.

`traffic` is what clients ask, `cache` and `engine` what an engine does with it, `router` what the gateway knows and decides,
`fleet` the clock that runs them, `figures` and `curves` what came of it, `table` and `page` (with `plots` and `look`) how that
is shown, `command` what `warmroute replay` does.
"""
