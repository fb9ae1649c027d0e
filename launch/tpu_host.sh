#!/usr/bin/env bash
# Install, mount the bucket and start to train, on one host of a TPU; tpu_vm.sh runs this script.
#
#   [BUCKET=NAME] launch/tpu_host.sh FLAGS_OF_TRAIN.PY…
#
# BUCKET is mounted at /mnt/bucket; the host's own disk caches CACHE_MB (50000) of it.
# Training is the systemd unit `tokenformer`, which outlives the connection:
#   sudo journalctl -fu tokenformer     follow its output
#   sudo systemctl stop tokenformer     save and end the run, on all hosts
source "$(dirname "$0")/common.sh"
cd "$(dirname "$0")/.."
venv=$HOME/venv user=$(id -un)

[[ -x $venv/bin/python ]] || { # The system's own Python may be too old.
  run env PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  run python3 -m uv venv --quiet --python=3.12 "$venv"
}
run python3 -m uv pip install --quiet --python="$venv" --constraint=constraints.txt -e '.[tpu,gcs,data]'

install_gcsfuse() {
  local packages=https://packages.cloud.google.com/apt key=/usr/share/keyrings/cloud.google.asc
  curl -fsS "$packages/doc/apt-key.gpg" | sudo tee "$key" >/dev/null
  echo "deb [signed-by=$key] $packages gcsfuse-$(lsb_release -cs) main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  sudo apt-get update -qq
  sudo apt-get install -qq gcsfuse
}

if [[ ${BUCKET:-} ]] && ! mountpoint -q "$MOUNT"; then
  command -v gcsfuse >/dev/null || run install_gcsfuse
  run sudo mkdir -p "$MOUNT"
  run sudo chown "$user" "$MOUNT"
  # Cache no metadata of the bucket, because other hosts write to it.
  run gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --cache-dir="$HOME/.cache/gcsfuse" \
    --file-cache-max-size-mb="${CACHE_MB:-50000}" --file-cache-cache-file-for-range-read=true \
    "$BUCKET" "$MOUNT"
fi

run sudo systemctl stop tokenformer || true
run sudo systemctl reset-failed tokenformer || true # The first time there is no such unit.
# SIGTERM goes to restart.sh only, which passes it on. RemainAfterExit shows a finished run as
# `exited`.
run sudo systemd-run --unit=tokenformer --uid="$user" --working-directory="$PWD" \
  --property=KillMode=mixed --property=TimeoutStopSec=300 --property=RemainAfterExit=yes \
  --setenv=PATH="$venv/bin:$PATH" ${BUCKET:+"--setenv=XDG_CACHE_HOME=$MOUNT/cache"} \
  "$PWD/launch/restart.sh" "${TRAIN[@]}" "$@"
