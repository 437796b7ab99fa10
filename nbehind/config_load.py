"""From a TOML file and `--set section.key=value` to a checked Config, and back to TOML.

    file ─▶ tables ─▶ overrides ─▶ names known? ─▶ pydantic ─▶ paths made absolute ─▶ config_rules.check ─▶ Config

Every problem is one line that names section.key, its value and what is allowed; all of them come at once (ConfigError).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from nbehind import config_rules
from nbehind.config import Config, Section
from nbehind.config_docs import allowed, is_number, is_text
from nbehind.config_toml import literal, toml_document, toml_value
from nbehind.errors import ConfigError

Tables = dict[str, dict[str, Any]]
RESERVED = {"demo", "fake", "smollm2"}  # names of built-in models and data, never files


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The config of the file with the overrides; ConfigError with a line a problem.

    Paths in the file that exist beside it are made absolute, paths in overrides that exist from here likewise.
    `run.dir` always counts from the working directory.
    """
    path = Path(path)
    tables = read_tables(path)
    _resolve_paths(tables, path.resolve().parent)
    return config_of(apply_overrides(tables, overrides), str(path))


def config_of(tables: Mapping[str, Any], name: str = "configuration") -> Config:
    """Validate tables; `name` stands in front of every problem."""
    problems = [*unknown_names(tables), *_wrong_kinds(tables)]
    config: Config | None = None
    try:
        config = Config.model_validate(tables)
    except ValidationError as error:
        problems += [
            describe(e["loc"], e["input"], e["msg"])
            for e in error.errors(include_url=False)
            if e["type"] not in ("extra_forbidden", "model_type")  # unknown_names says it better
        ]
    if config is not None and not problems:
        problems = config_rules.check(config)
    if problems or config is None:
        raise ConfigError([f"{name}: {problem}" for problem in dict.fromkeys(problems)])
    return config


def read_tables(path: Path) -> Tables:
    """The parsed file. A BOM is allowed; the text must be UTF-8."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_near_files(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder; give the .toml file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def apply_overrides(tables: Mapping[str, Any], overrides: Sequence[str]) -> Tables:
    """A copy of the tables with each `section.key=value` (or `section.options.key=value`) put in."""
    out: Tables = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tables.items()}
    for text in overrides:
        name, equals, raw = text.partition("=")
        parts = [p.strip() for p in name.split(".")]
        if not equals or len(parts) < 2 or not all(parts):
            raise ConfigError(f"--set {text}: write section.key=value, such as --set run.max_steps=10")
        override = _nested(parts[1:], _override_value(parts, raw.strip()))
        own: Tables = {parts[0]: override}
        _resolve_paths(own, Path.cwd())
        section = out.setdefault(parts[0], {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {text}: {parts[0]} is not a section of the file, but {toml_value(section)}")
        _merge(section, own[parts[0]])
    return out


def unknown_names(tables: Mapping[str, Any]) -> list[str]:
    """A problem for every section or key that does not exist, with the nearest one that does."""
    problems = []
    for section, values in tables.items():
        if section not in Config.model_fields:
            problems.append(f"unknown section or key {section!r}{_near_section(section)}")
        elif not isinstance(values, Mapping):
            problems.append(f"{section} = {toml_value(values)}: must be a section, [{section}]")
        else:
            known = section_class(section).model_fields
            problems += [f"unknown key {section}.{key}{_near_key(section, key)}" for key in values if key not in known]
    return problems


def describe(loc: tuple[int | str, ...], value: Any, message: str) -> str:
    """One line for a pydantic error."""
    name = ".".join(str(part) for part in loc)
    field = field_at(loc)
    wanted = f"must be {allowed(field)}" if field is not None else message
    return f"{name} = {_shown(value)}: {wanted}"


def section_class(section: str) -> type[Section]:
    """The class of a section of Config."""
    found = Config.model_fields[section].annotation
    assert isinstance(found, type)
    assert issubclass(found, Section)
    return found


def field_at(loc: Sequence[int | str]) -> FieldInfo | None:
    """The field of section.key, None for anything else."""
    if len(loc) < 2 or loc[0] not in Config.model_fields:
        return None
    return section_class(str(loc[0])).model_fields.get(str(loc[1]))


def dump_config(config: Config) -> str:
    """The whole config as TOML; load_config of it gives an equal one."""
    return toml_document({name: dict(getattr(config, name)) for name in Config.model_fields})


def _wrong_kinds(tables: Mapping[str, Any]) -> list[str]:
    """Problems that pydantic would let pass: a truth value or a text where a number belongs."""
    problems = []
    for section, values in tables.items():
        for key, value in values.items() if isinstance(values, Mapping) else ():
            field = field_at((section, key))
            if field is not None and is_number(field) and isinstance(value, (bool, str)):
                problems.append(describe((section, key), value, ""))
    return problems


def _override_value(parts: Sequence[str], raw: str) -> Any:
    """A literal, unless the key holds text: run.name=7 is the name "7"."""
    value = literal(raw)
    field = field_at(parts) if len(parts) == 2 else None
    return raw if field is not None and is_text(field) and not isinstance(value, str) else value


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def _merge(target: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Put `extra` in; a table that is given key by key keeps its other keys."""
    for key, value in extra.items():
        old = target.get(key)
        target[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value


def _resolve_paths(tables: Mapping[str, Any], base: Path) -> None:
    """Make paths absolute, in place, where they exist below `base`."""
    for section, key in (("data", "source"), ("model", "path"), ("redis", "password_file"), ("redis", "tls_ca")):
        values = tables.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), str):
            values[key] = _resolved(values[key], base)
    reward = tables.get("reward")
    if isinstance(reward, dict) and isinstance(reward.get("name"), str):
        file, colon, function = reward["name"].rpartition(":")
        if colon and file.endswith(".py"):
            reward["name"] = f"{_resolved(file, base)}:{function}"


def _resolved(text: str, base: Path) -> str:
    if not text or text in RESERVED or text.startswith("reasoning_gym:"):
        return text
    found = base / Path(text).expanduser()
    try:
        return str(found) if found.exists() else text
    except OSError:  # a name that no file can have, such as a very long one
        return text


def _near_key(section: str, key: str) -> str:
    near = difflib.get_close_matches(key, section_class(section).model_fields, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {section}.{near[0]}?"
    elsewhere = [s for s in Config.model_fields if key in section_class(s).model_fields]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}.{key}?"
    return f"; [{section}] has {', '.join(section_class(section).model_fields)}"


def _near_section(name: str) -> str:
    holders = [s for s in Config.model_fields if name in section_class(s).model_fields]
    if holders:
        return f"; did you mean {' or '.join(f'{s}.{name}' for s in holders)}?"
    near = difflib.get_close_matches(name, Config.model_fields, n=1, cutoff=0.5)
    return f"; did you mean [{near[0]}]?" if near else f"; the sections are {', '.join(Config.model_fields)}"


def _near_files(path: Path) -> str:
    folder = path.parent
    names = sorted(p.name for p in folder.glob("*.toml")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return (
        f"; did you mean {folder / near[0]}?" if near else "; give the path of a .toml file, such as examples/demo.toml"
    )


def _shown(value: Any) -> str:
    try:
        text = toml_value(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
