#!/usr/bin/env bash
# What tpu_vm.sh runs on every host of a TPU: installs, mounts the bucket, starts to train.
#
#   [BUCKET=NAME] launch/tpu_host.sh FLAGS_OF_TRAIN.PY…
#
# BUCKET is mounted at /mnt/bucket; CACHE_MB (50000) of it are kept on the host's own disk.
# Training is the systemd unit `tokenformer`, which outlives the connection:
#   sudo journalctl -fu tokenformer     what it says
#   sudo systemctl stop tokenformer     has it save and end, on all hosts
source "$(dirname "$0")/common.sh"
cd "$(dirname "$0")/.."
venv=$HOME/venv user=$(id -un)

[[ -x $venv/bin/python ]] || { # The system's own Python may be too old.
  run env PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  run python3 -m uv venv --quiet --python=3.12 "$venv"
}
run python3 -m uv pip install --quiet --python="$venv" --constraint=constraints.txt -e '.[tpu,gcs]'

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
  # No memory of what is in the bucket: other hosts write there, too.
  run gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --cache-dir="$HOME/.cache/gcsfuse" \
    --file-cache-max-size-mb="${CACHE_MB:-50000}" --file-cache-cache-file-for-range-read=true \
    "$BUCKET" "$MOUNT"
fi

run sudo systemctl stop tokenformer || true
run sudo systemctl reset-failed tokenformer || true # It is not there the first time.
# SIGTERM goes to restart.sh alone, which passes it on; `exited` tells a finished run from none.
run sudo systemd-run --unit=tokenformer --uid="$user" --working-directory="$PWD" \
  --property=KillMode=mixed --property=TimeoutStopSec=300 --property=RemainAfterExit=yes \
  --setenv=PATH="$venv/bin:$PATH" ${BUCKET:+"--setenv=XDG_CACHE_HOME=$MOUNT/cache"} \
  "$PWD/launch/restart.sh" "${TRAIN[@]}" "$@"
