"""The words that the tiny model knows as one token each, with or without a space before them."""

WORDS = """
agent answer batch block branch build cache call change check client close code count deploy edit engine error event fetch
file find first fix folder function gateway group hash head index input item join key last line link list load lock log loop
map memory merge message model module name next node number open order output page parse path plan point pool process
prompt queue read record repeat reply request result return route row rule run schema search send server session set share
shard show size sort source split start state step store stream string system table tail task test text thread time token
tool trace tree turn type unit update use user value wait when with word work write zone and for from in into is it no not of
on or that the then this to
""".split()
