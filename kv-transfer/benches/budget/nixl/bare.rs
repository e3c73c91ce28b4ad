//! The library driven bare, as one would who trusts everybody: both sides' descriptors prepared once, one request a room
//! made of all its indices, posted, looked at until it is done, let go of.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::null_mut;
use std::time::Duration;

use kv_transfer::nixl::NixlConfig;
use nixl_capi_sys::{AgentConfig, Api, Handle, OP_WRITE, SYNC_RW, mem, status};

use crate::Result;
use crate::sys::now_ns;

fn check(what: &str, code: c_int) -> Result<()> {
    if code == status::SUCCESS { Ok(()) } else { Err(format!("bare NIXL: {what}: {}", status::name(code)).into()) }
}

/// An agent with one backend, set up as kv-nixl sets up its own. What it makes lives as long as the process.
pub struct Agent {
    api: Api,
    handle: Handle,
}

/// Descriptors of a pool here and of a pool there, prepared.
pub struct Lists {
    local: Handle,
    remote: Handle,
}

// SAFETY: the library binds its handles to no thread, and the agent is made with SYNC_RW.
unsafe impl Send for Agent {}
// SAFETY: as above.
unsafe impl Send for Lists {}

/// A transfer in progress.
pub struct Request(Handle);

impl Agent {
    /// The environment must be prepared.
    pub fn new(name: &str, errors: &str) -> Result<Self> {
        let api = Api::open(None)?;
        let ours = NixlConfig::default();
        let settings = AgentConfig {
            progress_thread: true,
            listen_thread: false,
            listen_port: 0,
            sync: SYNC_RW,
            workers: ours.workers,
            progress_delay_us: ours.progress_delay.as_micros() as u64,
            listen_delay_us: 100_000,
            telemetry: false,
        };
        let name = CString::new(name)?;
        let (mut handle, mut params, mut backend) = (null_mut(), null_mut(), null_mut());
        // SAFETY: strings that end in 0, settings of the library's layout, places for the handles; live handles.
        unsafe {
            let made = (api.create_configured_agent)(name.as_ptr(), &raw const settings, &raw mut handle);
            check("make an agent", made)?;
            check("make parameters", (api.create_params)(&raw mut params))?;
            for (key, value) in [("num_workers", ours.workers.to_string()), ("ucx_error_handling_mode", errors.into())]
            {
                let (key, value) = (CString::new(key)?, CString::new(value)?);
                check("add a parameter", (api.params_add)(params, key.as_ptr(), value.as_ptr()))?;
            }
            check("make UCX", (api.create_backend)(handle, c"UCX".as_ptr(), params, &raw mut backend))?;
        }
        Ok(Self { api, handle })
    }

    /// Register host memory, which stays there.
    pub fn register(&self, addr: u64, len: u64) -> Result<()> {
        let mut list = null_mut();
        // SAFETY: places for the handle; live handles; the caller keeps the memory for the life of the process.
        unsafe {
            check("make a list", (self.api.create_reg_dlist)(mem::DRAM, &raw mut list))?;
            let added = (self.api.reg_dlist_add_desc)(list, addr as usize, len as usize, 0, std::ptr::null(), 0);
            check("add to a list", added)?;
            check("register", (self.api.register_mem)(self.handle, list, null_mut()))
        }
    }

    /// Learn a peer and connect to it; its name.
    pub fn connect(&self, metadata: &[u8]) -> Result<CString> {
        let mut name: *mut c_char = null_mut();
        // SAFETY: bytes with their length, a place for the pointer; the library's string is freed once.
        unsafe {
            let data = metadata.as_ptr().cast();
            check("load metadata", (self.api.load_remote_md)(self.handle, data, metadata.len(), &raw mut name))?;
            let text = CStr::from_ptr(name).to_owned();
            nixl_capi_sys::free(name.cast());
            let made = (self.api.agent_make_connection)(self.handle, text.as_ptr(), null_mut());
            check("connect", made)?;
            Ok(text)
        }
    }

    /// Forget a peer.
    pub fn disconnect(&self, name: &CStr) -> Result<()> {
        // SAFETY: a live agent, a string that ends in 0.
        check("forget a peer", unsafe { (self.api.invalidate_remote_md)(self.handle, name.as_ptr()) })
    }

    fn list(&self, name: &CStr, ranges: impl Iterator<Item = (u64, u64)>) -> Result<Handle> {
        let (mut list, mut prepared) = (null_mut(), null_mut());
        // SAFETY: places for the handles; live handles; a string that ends in 0.
        unsafe {
            check("make a list", (self.api.create_xfer_dlist)(mem::DRAM, &raw mut list))?;
            for (addr, len) in ranges {
                check("add to a list", (self.api.xfer_dlist_add_desc)(list, addr as usize, len as usize, 0))?;
            }
            let made = (self.api.prep_xfer_dlist)(self.handle, name.as_ptr(), list, &raw mut prepared, null_mut());
            check("prepare a list", made)?;
            check("end a list", (self.api.destroy_xfer_dlist)(list))?;
        }
        Ok(prepared)
    }

    /// Prepare (address, length) pairs of both sides.
    pub fn prepare(
        &self,
        peer: &CStr,
        local: impl Iterator<Item = (u64, u64)>,
        remote: impl Iterator<Item = (u64, u64)>,
    ) -> Result<Lists> {
        Ok(Lists { local: self.list(c"", local)?, remote: self.list(peer, remote)? })
    }

    /// End prepared lists.
    pub fn unprepare(&self, lists: &Lists) -> Result<()> {
        for list in [lists.local, lists.remote] {
            // SAFETY: live handles, ended once.
            check("end a list", unsafe { (self.api.release_xfer_dlist_handle)(self.handle, list) })?;
        }
        Ok(())
    }

    /// Start a write of these descriptors.
    pub fn post(&self, lists: &Lists, from: &[i32], to: &[i32]) -> Result<Request> {
        let mut request = null_mut();
        // SAFETY: live handles, indices with their counts, a place for the handle.
        unsafe {
            let made = (self.api.make_xfer_req)(
                self.handle,
                OP_WRITE,
                lists.local,
                from.as_ptr(),
                from.len(),
                lists.remote,
                to.as_ptr(),
                to.len(),
                &raw mut request,
                null_mut(),
            );
            check("make a transfer", made)?;
            match (self.api.post_xfer_req)(self.handle, request, null_mut()) {
                status::SUCCESS | status::IN_PROG => Ok(Request(request)),
                code => Err(format!("bare NIXL: post: {}", status::name(code)).into()),
            }
        }
    }

    /// Whether it is over; then it is let go of.
    pub fn over(&self, request: &Request) -> Result<bool> {
        // SAFETY: live handles; the request is not used after it is over.
        unsafe {
            match (self.api.get_xfer_status)(self.handle, request.0) {
                status::SUCCESS => {}
                status::IN_PROG => return Ok(false),
                code => return Err(format!("bare NIXL: transfer: {}", status::name(code)).into()),
            }
            check("let go", (self.api.release_xfer_req)(self.handle, request.0))?;
            check("end", (self.api.destroy_xfer_req)(request.0))?;
        }
        Ok(true)
    }

    /// Rooms, at most `in_flight` at a time, looked at without a rest or after each `pause`; ns.
    pub fn rooms(&self, lists: &Lists, rooms: &[[Vec<i32>; 2]], in_flight: usize, pause: Duration) -> Result<u64> {
        let start = now_ns();
        let (mut left, mut flying) = (rooms.iter(), Vec::new());
        loop {
            while flying.len() < in_flight {
                let Some([from, to]) = left.next() else { break };
                flying.push(self.post(lists, from, to)?);
            }
            if flying.is_empty() {
                return Ok(now_ns() - start);
            }
            let before = flying.len();
            let mut going = Vec::with_capacity(before);
            for request in flying {
                if !self.over(&request)? {
                    going.push(request);
                }
            }
            if going.len() == before {
                if pause.is_zero() { std::thread::yield_now() } else { std::thread::sleep(pause) }
            }
            flying = going;
        }
    }
}
