"""Which rank hangs, judged by what its main thread does and for how long. Pure: time is a parameter.

Each launcher judges its own ranks by their boards, and those of the others by what their launchers say (`stalls`);
it acts on its own ranks only, so that of all launchers one acts.

- A rank whose end is in its own hands is hung when it takes longer than the deadline of what it does. The deadline of
  a step follows the median of the last steps; until enough are known, first steps may compile.
- A rank that waits for others is not to blame, however long it waits, unless it shows no sign of life.
- After a step comes what a script does beside it (it logs, or asks a loader of its own): that has the time of data,
  and a rank is to blame earlier only if it shows no sign of life.
- When all ranks of a world wait, nobody is to blame and nobody will come: their collectives do not match. The odd
  one out is named, and the attempt is ended without killing anyone: all can leave it by themselves.
- A launcher that was not heard just now is unknown: its ranks do not count as waiting, and meanwhile no rank is
  blamed that shows signs of life.
- A rank that said that it left its attempt has the deadline of what it does from then on; in the next world others
  wait for it. One that waits for that world only has to show signs of life.
- When a verdict would leave no rank of the world with its state, there is no hurry: whatever slows down all alike is
  rather a long step than a hang. Of ranks that left, only those here are known, so that one of them must be left.
- Of several that are late, those without a sign of life are to blame: the others may wait for them in a
  collective of the script's own.
- A second hang at the same step may be a step that takes so long: the deadline grows until a step is made.
- Time in which the launcher itself did not run counts for nobody; time in which a rank stood in line for a CPU does
  not count for that rank.
"""
