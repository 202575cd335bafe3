"""JSON schemas of records."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from twellc.base.records import OneOf, Range, Record, forms_of

_TYPES = {str: "string", int: "integer", bool: "boolean"}


def schema_of(kinds: dict[str, type[Any]], name: str, strict: bool = False) -> dict[str, Any]:
    """Return the JSON schema of records.

    Args:
        kinds: The records by their titles; the JSON is one of them.
        name: The name of the schema.
        strict: Whether keys without a field are refused; a later version may have more.
    """
    defined: dict[str, Any] = {}
    forms = [_form(kind, defined, strict) for kind in kinds.values()]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": name, "title": " or ".join(kinds)}
    return {**head, **(forms[0] if len(forms) == 1 else {"anyOf": forms}), "$defs": defined}


def _form(form: Any, defined: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Return the schema of a form; those of dataclasses are put into `defined`."""
    origin = get_origin(form)
    if origin in (Union, UnionType):
        return {"anyOf": [_form(each, defined, strict) for each in get_args(form)]}
    if origin is Annotated:
        bare, limit = get_args(form)
        return {**_form(bare, defined, strict), **_limits(limit, bare)}
    if is_dataclass(form) and isinstance(form, type):
        if form.__name__ not in defined:
            defined[form.__name__] = {}  # a record may hold itself
            defined[form.__name__] = _record(form, defined, strict)
        return {"$ref": f"#/$defs/{form.__name__}"}
    if origin in (list, tuple):
        return {"type": "array", "items": _form(get_args(form)[0], defined, strict)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _form(get_args(form)[1], defined, strict)}
    if form is float:
        return {"type": ["number", "null"]}  # NaN and infinity are null
    if form is type(None):
        return {"type": "null"}
    return {"type": _TYPES[form]} if form in _TYPES else {}


def _limits(limit: Range | OneOf, bare: Any) -> dict[str, Any]:
    if isinstance(limit, OneOf):
        return {"enum": list(limit.choices)}
    # Bounds that a float cannot hold exactly are left out.
    bounds = {"exclusiveMinimum" if limit.open else "minimum": limit.least, "maximum": limit.most}
    return {name: bare(bound) for name, bound in bounds.items() if abs(bound) < 2**53}


def _record(kind: Any, defined: dict[str, Any], strict: bool) -> dict[str, Any]:
    forms = forms_of(kind)
    optional = {each.name for each in fields(kind) if each.metadata.get("optional") or each.default is not MISSING}
    properties = {each.name: _form(forms[each.name], defined, strict) for each in fields(kind)}
    if issubclass(kind, Record):
        for name in kind.computed:
            properties[name] = _form(get_type_hints(getattr(kind, name).fget)["return"], defined, strict)
    described = (kind.__doc__ or "").strip().split("\n\n")[0]
    found = {
        "type": "object",
        "description": " ".join(described.split()),
        "properties": properties,
        "required": sorted(properties.keys() - optional),
    }
    return found | ({"additionalProperties": False} if strict else {})
