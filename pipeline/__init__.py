"""From logged bytes to kept rows. The modules, in the order in which data passes them.

recipes       YAML and -s to a recipe
verl_words    verl's own keys to a recipe's
sources       which files are the log, a step each
readers       bytes to rows: readers.jsonl (by readers.flat where records are plain, else by
              readers.records), readers.parquet (by readers.footer and readers.arrow_types),
              readers.generation
captured      what a captured file says of itself, and what pins its tokens
rewards       scores by the user's own function
aids          what else the user names to read a log: a tokenizer, a reward function
fields        what logged names mean
values        logged values as numbers and as text
facts         rows to light columns
groups        which rows answer one prompt, which make one rollout
texts         what is copied beside the light columns
carried       what steps hand on to later ones
load          all of the above for one step
expressions   row expressions: checked and evaluated DuckDB SQL
score         what a rollout is worth
difficulty    how hard a prompt is against the others
segments      the rows of each group side by side: counts, places, ranks
select        which rollouts are kept, and why the others are not
judge         the stages as one pure function
tables        a judged step to its tables and manifest
remarks       what a person should know of it
files         files written so that they last
info          what a run is: its recipe, readers and log folder
store         the run folder, and all that is written into it
batch         the driver: a whole log into a run
rejudge       a run judged again from its logs, and compared value by value
verify        whether a run is as it was published, and its logs as they were
views         the views of the contract, over what is stored and the Parquet logs
sql           one SELECT over them
summary       a run in a few lines
stats         what a log or a run holds, by verl's metric names
points        a grid of recipes, and what each keeps
sweep         the driver: every point of a grid over one reading of a log, nothing stored
chart         a sweep as a drawing
replay        the kept rows back into verl's actor update: replay.plan, replay.tokens,
              replay.advantages, replay.share, replay.tensors and replay.dataset make an item of
              a step, replay.preflight looks at all of them; replay.settings, replay.devices,
              replay.cpu and replay.worker set up verl, replay.correction weighs what is stale,
              replay.update trains on an item, replay.checkpoints keeps and replay.trainer runs it
capture       what verl sampled into files that a filter reads: capture.hooks finds verl's methods,
              capture.v1 and capture.v0 wrap them, capture.settings, capture.lists and capture.rows
              make columns of what verl holds, capture.online lets a recipe choose what is trained
              on, capture.recorder collects a step, capture.background does the rest behind
              training, capture.writer writes it
"""
