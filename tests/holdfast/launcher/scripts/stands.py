"""keeps.py as the launcher sees a script with Holdfast's loop, which may be started before its world is known."""

import pathlib
import runpy


def as_people_write_it():
    import holdfast

    return holdfast.init()


runpy.run_path(str(pathlib.Path(__file__).with_name("keeps.py")), run_name="__main__")
