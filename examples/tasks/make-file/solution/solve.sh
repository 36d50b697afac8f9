#!/bin/bash
touch hello.txt
