"""Detects ranks that hang, from the activity of their main threads and its duration. Pure: time is a parameter.

Each launcher judges its own ranks by their activity pages, and remote ranks by the reports of their launchers
(`stalls`). A launcher ends only its own ranks, so exactly one launcher acts on a hang.

- A rank whose activity depends on itself hangs if the activity takes longer than its deadline. The deadline of a step
  follows from the median of the last steps. Until enough steps are known, it allows for compilation.
- A rank that waits for other ranks does not hang, however long it waits, unless it shows no sign of life.
- After a step, a script may log or load data on its own. This has the deadline of data loading. The rank hangs
  earlier only if it shows no sign of life.
- If all ranks of a world wait for each other, their collectives do not match. The detector reports the rank that
  differs, and the attempt ends. No rank is killed, because all of them can leave the attempt.
- If a launcher has stopped reporting, its ranks are unknown and do not count as waiting. Until it reports again, no
  rank that shows signs of life is blamed.
- A rank that reported `left` for its attempt has the deadline of its activity from then on, because the next world
  waits for it. If the rank itself waits for that world, it only has to show signs of life.
- If a verdict would leave no rank of the world with its state, the deadline is longer: a slowdown of all ranks is
  more likely a long step than a hang. Of the ranks that left, only local ones are known, so one of these must remain.
- If several ranks are late, only those without a sign of life are blamed: the others may wait for them in a
  collective of the script.
- A second hang at the same step may be a step that takes this long. The deadline grows until a step completes.
- Time in which the launcher itself did not run counts for no rank. CPU starvation of a rank does not count for that
  rank.
"""
