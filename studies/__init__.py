"""Many small learning runs side by side on one machine, and what their reports say together.

    python -m studies headline noise --processes 14 --gpus 1 --budget 560 --out build/studies
    python -m studies report build/studies --to docs/results

A study is a list of runs (arm, seed, overrides of settings); a run is one `onlinerl.validate` course.
"""
