"""keeps.py as a script that uses Holdfast's loop, which the launcher may start before its world exists."""

import pathlib
import runpy


def as_people_write_it():
    import holdfast

    return holdfast.init()


runpy.run_path(str(pathlib.Path(__file__).with_name("keeps.py")), run_name="__main__")
