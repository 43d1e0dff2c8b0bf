#!/bin/sh
# After the package was installed or upgraded: a running systemd looks at the units again. Nothing is enabled and nothing started.
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload || :
fi
