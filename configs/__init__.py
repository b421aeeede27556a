"""Presets: YAML files, data only. `meshwright train NAME` reads NAME.yaml."""
