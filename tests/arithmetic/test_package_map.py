"""Rooms, layers, arrows and circles of a package are counted as they are."""

from pathlib import Path

from benchmarks import package_map


def write(package: Path, **files: str) -> None:
    for name, source in files.items():
        path = package.joinpath(*name.split("_")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def rooms(package):
    return package_map.count(package, lambda module: module[:1])


def files(package):
    return package_map.count(package, lambda module: module)


def test_a_room_that_imports_another_twice_is_one_arrow(tmp_path):
    package = tmp_path / "house"
    late = "def f():\n    from house import base"
    write(package, base="", core_a="from house import base", core_b="from . import a\n" + late)
    assert rooms(package) == "2 in 2 layers, 1 arrows, 0 on circles"
    assert files(package) == "3 in 3 layers, 3 arrows, 0 on circles"


def test_what_imports_itself_by_way_of_others_is_named_and_shares_a_layer(tmp_path):
    package = tmp_path / "house"
    write(package, base="", a="import house.b", b="from house import a, base", top="from house import a")
    assert rooms(package) == "4 in 3 layers, 4 arrows, 2 on circles a b"
